"""Creating caches: what a request asks for, the work, and the way onto the shelf."""
