"""run_tests.py NAME...: runs these tests, prints one line each, exits with 1 if any failed.

What it prints has no times in it: the same code gives the same output, always.
"""

import sys

from tests import test_pool


def main(names):
    failed = 0
    for name in names:
        test = getattr(test_pool, name, None)
        if test is None:
            print(f"FAILED {name}: there is no such test")
            failed += 1
            continue
        try:
            test()
            print(f"passed {name}")
        except Exception as error:
            print(f"FAILED {name}: {error or type(error).__name__}")
            failed += 1
    print(f"{len(names)} tests, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
