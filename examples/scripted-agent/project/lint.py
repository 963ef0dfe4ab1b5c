"""lint.py FOLDER: every file compiles, has a docstring, no long lines and no trailing blanks."""

import ast
import pathlib
import sys


def main(folder):
    problems = []
    files = sorted(pathlib.Path(folder).glob("*.py"))
    for file in files:
        text = file.read_text()
        if ast.get_docstring(ast.parse(text, str(file))) is None:
            problems.append(f"{file}: no docstring")
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > 100:
                problems.append(f"{file}:{number}: longer than 100")
            if line != line.rstrip():
                problems.append(f"{file}:{number}: trailing blanks")
    print("\n".join(problems) or f"{len(files)} files are fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
