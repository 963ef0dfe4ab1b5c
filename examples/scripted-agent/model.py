"""The model: a script that answers from the prompt alone, always the same.

As a program it takes a chat completion's request on its standard input and prints the response: what a fork with
`model: {mode: Command}` runs.
"""

import json
import sys

NAME = "scripted-1"
LEAK = "        return connection\n"
FIXED = "        self.free.append(connection)\n        return connection\n"


def answer(prompt):
    if prompt.startswith("Say in a sentence"):
        if "FAILED" in prompt:
            return "The connections are given back now, but one test still fails: it waits for longer than it may."
        return "The connections are given back now, and all selected tests pass."
    source = prompt.split("\n", 1)[1]
    head, release, tail = source.partition("    def release(self, connection):\n")
    return head + release + tail.replace(LEAK, FIXED, 1)


def usage(prompt, answer):
    asked, given = len(prompt.split()), len(answer.split())
    return {"prompt_tokens": asked, "completion_tokens": given, "cost": round(asked * 3e-6 + given * 15e-6, 6)}


def main():
    prompt = json.load(sys.stdin)["messages"][-1]["content"]
    said = answer(prompt)
    message = {"role": "assistant", "content": said}
    json.dump({"object": "chat.completion", "model": NAME, "choices": [{"index": 0, "message": message}], "usage": usage(prompt, said)}, sys.stdout)


if __name__ == "__main__":
    main()
