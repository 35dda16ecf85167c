"""What every source file has to keep to: size, length of functions, ASCII, reasons for ignores.

Pure functions over source text; ``tracked_files`` alone touches the repository.
"""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 59
MAX_FILE_BYTES = 500_000
# The corpus is one file so that its order, and with it every sample id, is fixed.
LARGE_FILES = {"tests/assets/jargon/jargon.jsonl"}

_SUPPRESSION = re.compile(r"#\s*(?:noqa|type:\s*ignore|pyrefly:\s*ignore)")
_WITH_CODE = re.compile(
    r"#\s*(?:noqa:\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*"
    r"|(?:type|pyrefly):\s*ignore\[[\w\-, ]+\])(?P<rest>.*)"
)
# Two words at least; "legacy" or "ok" alone is no reason.
_REASON = re.compile(r"[A-Za-z'-]{2,}\W+[A-Za-z'-]{2,}")


def tracked_files(*patterns: str) -> list[str]:
    """Files of the working tree that git does not ignore, relative to the root, sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    # A file deleted but not yet committed is still in the index.
    return sorted({line for line in output.splitlines() if (ROOT / line).is_file()})


def module_name(path: str) -> str:
    """Dotted name of a source file given relative to the root."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def size_violations(path: str, source: str) -> list[str]:
    """The file itself and every function in it that is too long."""
    found = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            num_lines = (node.end_lineno or first) - first + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(
                    f"{path}:{first}: {node.name} has {num_lines} lines, at most "
                    f"{MAX_FUNCTION_LINES}"
                )
    return found


def ascii_violations(path: str, source: str) -> list[str]:
    return [
        f"{path}:{number}: {sorted({c for c in line if not c.isascii()})} is not ASCII"
        for number, line in enumerate(source.splitlines(), start=1)
        if not line.isascii()
    ]


def suppression_violations(path: str, source: str) -> list[str]:
    """Comments that silence a tool without naming what they silence, or without a reason."""
    found = []
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for line, comment in comments.items():
        if _SUPPRESSION.search(comment) is None:
            continue
        with_code = _WITH_CODE.search(comment)
        above = comments.get(line - 1, "")
        if with_code is None:
            found.append(f"{path}:{line}: silences everything; name the code")
        elif not (_REASON.search(with_code["rest"]) or _REASON.search(above)):
            found.append(f"{path}:{line}: silences a check without a reason beside it")
    return found
