"""Talk about a long document with Anthropic's own client: it is prefilled once, and each turn is kept for the next.

pip install anthropic . (in a checkout of kvshelf)
python examples/anthropic_client.py         # the service at KVSHELF_URL, or http://127.0.0.1:8765
"""

import os

from anthropic import Anthropic

URL = os.environ.get("KVSHELF_URL", "http://127.0.0.1:8765")
KEY = os.environ.get("KVSHELF_API_KEY", "none")  # a service without keys takes any

NAMES = ("amber falcon", "silver heron", "green otter", "white raven", "plain toad")
CODES = {name: str(482913 + 31337 * number) for number, name in enumerate(NAMES)}
DOCUMENT = "".join(
    f"The access code of the {name} is {code}. " + "The harbour opens at six, and boats wait at the lock. " * 40
    for name, code in CODES.items()
)
TURNS = 10


def main() -> None:
    client = Anthropic(base_url=URL, api_key=KEY)
    model = next(iter(client.models.list())).id
    system = [{"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    messages = []
    print("turn | read from the shelf | prefilled and kept | prefilled | answer")
    for turn in range(TURNS):
        question = f"What is the access code of the {NAMES[turn % len(NAMES)]}?"
        # Marked, the question and its answer are kept behind the document; an earlier turn needs no mark.
        block = {"type": "text", "text": question, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        reply = client.messages.create(
            model=model, max_tokens=16, system=system, messages=[*messages, {"role": "user", "content": [block]}]
        )
        answer = reply.content[0].text
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        used = reply.usage
        tokens = (used.cache_read_input_tokens, used.cache_creation_input_tokens, used.input_tokens)
        print(turn + 1, *tokens, answer, sep=" | ")

    print("streamed:", end=" ")
    messages.append({"role": "user", "content": "What is the access code of the amber falcon?"})
    with client.messages.stream(model=model, max_tokens=16, system=system, messages=messages) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
