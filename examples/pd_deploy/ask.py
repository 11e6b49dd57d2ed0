"""Send one chat request to an OpenAI-compatible server and print the answer as it comes. Standard library only.

The same with curl::

    curl -N URL/v1/chat/completions -H 'Content-Type: application/json' -H 'X-Request-Id: example-1' \\
         -d '{"model": "model", "messages": [{"role": "user", "content": "..."}], "max_tokens": 24, "stream": true}'
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request

TIMEOUT_S = 300.0


def main() -> int:
    """Ask; 0 where an answer came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="base URL, e.g. http://127.0.0.1:8000")
    parser.add_argument("question")
    parser.add_argument("--request-id", default="example-1", help="found again in the logs of proxy and engines")
    arguments = parser.parse_args()
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": arguments.question}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": arguments.request_id}
    request = urllib.request.Request(f"{arguments.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    answered = False
    # a proxy set for the internet has no business with this machine's own address
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                print(event["error"]["message"], file=sys.stderr)
                return 1
            text = event["choices"][0]["delta"].get("content") if event["choices"] else None
            print(text or "", end="", flush=True)
            answered = answered or bool(text)
    print()
    return 0 if answered else 1


if __name__ == "__main__":
    sys.exit(main())
