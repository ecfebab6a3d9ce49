#!/usr/bin/env python3
"""The container's health check: exit code 0 if the service in it is alive. curl would be one more package to patch."""

import os
import sys
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('KVSHELF_PORT', '8765')}/livez"
try:
    with urllib.request.urlopen(url, timeout=4):
        pass
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"{url}: {error}")
