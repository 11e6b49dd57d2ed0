"""Make this checkout importable without pip, entry points included: ``python scripts/link_checkout.py FOLDER``.

For machines without a package index. FOLDER goes on ``PYTHONPATH``; it then holds links to the packages and a
``.dist-info`` with the entry points of pyproject.toml, by which vLLM finds the plug-in and the launcher its connectors.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/link_checkout.py FOLDER")
    folder = Path(sys.argv[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()), "")]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for package in (ROOT / "pdkv", ROOT / "connectors" / "pdkv_connectors"):
        link = folder / package.name
        if not link.exists():
            link.symlink_to(package, target_is_directory=True)
    print(folder.resolve())


if __name__ == "__main__":
    main()
