"""Ask a document on the shelf with OpenAI's own client, without sending or prefilling it again.

pip install openai . (in a checkout of kvshelf)
python examples/openai_client.py            # the service at KVSHELF_URL, or http://127.0.0.1:8765
"""

import os

from openai import OpenAI

from kvshelf import Client

URL = os.environ.get("KVSHELF_URL", "http://127.0.0.1:8765")
KEY = os.environ.get("KVSHELF_API_KEY", "none")  # a service without keys takes any

DOCUMENT = "The harbour opens at six. The access code of the amber falcon is 482913. Boats wait at the lock. " * 3


def main() -> None:
    with Client(URL) as shelf:
        cache = shelf.caches.create(document=DOCUMENT, policy="full")

    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    request = {
        "model": cache.model,
        "messages": [{"role": "user", "content": "What is the access code of the amber falcon?"}],
        "max_tokens": 16,
        "extra_body": {"cache_id": cache.id},
    }
    reply = client.chat.completions.create(**request)
    print("answer:", reply.choices[0].message.content)
    print("tokens from the shelf:", reply.usage.prompt_tokens_details.cached_tokens)
    print("tokens read for the question:", reply.usage.prompt_tokens - reply.usage.prompt_tokens_details.cached_tokens)

    print("streamed:", end=" ")
    for chunk in client.chat.completions.create(**request, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
