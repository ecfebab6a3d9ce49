"""Who may call the service, and how much: API keys, tenants and rate limits."""
