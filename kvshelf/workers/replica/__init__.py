"""One replica: an engine, its scheduler and a store behind asynchronous methods. No Ray, no HTTP."""
