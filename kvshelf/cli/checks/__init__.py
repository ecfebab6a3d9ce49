"""What `kvshelf doctor` checks besides this machine: stores, and the isolation of tenants."""
