"""The model: a script that answers from the prompt alone, always the same."""

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
