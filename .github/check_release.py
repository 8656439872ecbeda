"""Checks that the files name the version of a tag and every address: ``python .github/check_release.py v0.1.0``."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ADDRESSES = ("Repository", "Documentation", "Issues", "Changelog")


def problems(root: Path, tag: str) -> list[str]:
    """A sentence for everything in the checkout ``root`` that stands against a release as ``tag``."""
    found = []
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    found += [
        f"pyproject.toml: [project.urls] must have {name}, an address that begins with https://, got {urls.get(name)!r}"
        for name in ADDRESSES
        if not str(urls.get(name)).startswith("https://")
    ]
    package = root / "src" / "dilated_attention_pytorch" / "__init__.py"
    citation, changelog = (root / "CITATION.cff").read_text(), (root / "CHANGELOG.md").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', package.read_text(), flags=re.MULTILINE)
    if tag != f"v{version}":
        found.append(f"the tag must be v{version}, the version of {package.relative_to(root)}, got {tag}")
    for key, expected in (("version", version), ("repository-code", urls.get("Repository"))):
        cited = re.findall(rf"^{key}: (.+)$", citation, flags=re.MULTILINE)
        if cited != ([] if expected is None else [expected]):
            found.append(f"CITATION.cff: {key} must be {expected}, got {', '.join(cited) or 'none'}")
    first = next(line for line in changelog.splitlines() if line.startswith("## "))
    if not re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)", first):
        found.append(f"CHANGELOG.md must begin with '## {version} (YYYY-MM-DD)', got {first!r}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"expected one tag, got {sys.argv[1:]}: {__doc__}")
    sys.exit("\n".join(problems(Path(__file__).parents[1], sys.argv[1])) or None)
