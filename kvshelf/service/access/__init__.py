"""Access control: API keys, tenants and rate limits."""
