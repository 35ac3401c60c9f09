"""Fetch the web page's libraries anew, as its MANIFEST.json names them, and note what came.

To take another version, change it there and run this. Needs npm; nothing else in the project does.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "tokenmill" / "server" / "web" / "vendor"


def main() -> None:
    manifest = VENDOR / "MANIFEST.json"
    libraries = json.loads(manifest.read_text())
    for library in libraries:
        package = f"{library['package']}@{library['version']}"
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True)
            with tarfile.open(Path(folder, packed.stdout.decode().split()[-1])) as archive:
                content = _read(archive, library["source"])
                licence = _read(archive, "LICENSE")
        (VENDOR / library["file"]).write_bytes(content)
        (VENDOR / f"{library['file']}.LICENSE").write_bytes(licence)
        library["sha256"] = hashlib.sha256(content).hexdigest()
        print(f"{package}: {library['file']}, {len(content):,} bytes, {library['licence']}")
    manifest.write_text(json.dumps(libraries, indent=2) + "\n")


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    assert member is not None, name
    return member.read()


if __name__ == "__main__":
    main()
