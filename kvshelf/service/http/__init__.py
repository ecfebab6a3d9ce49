"""HTTP itself: bodies, errors, event streams, downloads and the server."""
