#!/usr/bin/env python3
"""bill_of_materials.py: writes FOLDER/flash-dmattn-VERSION.cdx.json, CycloneDX 1.6: the release, its files with their
checksums, and what it needs. The library holds no code of others; the C library comes from the user's system.
Usage: bill_of_materials.py FOLDER VERSION COMMIT"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import tomllib

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    folder, version, commit = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    licence = LicenseExpression("BSD-3-Clause")
    root = Component(type=ComponentType.LIBRARY, name="flash-dmattn", version=version, licenses=[licence],
                     purl=PackageURL("pypi", name="flash-dmattn", version=version), bom_ref="flash-dmattn",
                     properties=[Property(name="commit", value=commit)])
    bom = Bom()
    bom.metadata.component = root
    for path in sorted(folder.iterdir()):
        digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(path.read_bytes()).hexdigest())
        bom.components.add(Component(type=ComponentType.FILE, name=path.name, hashes=[digest], licenses=[licence],
                                     bom_ref=path.name))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {line.split(">")[0]: line for lines in extras.values() for line in lines}
    needs = [Component(type=ComponentType.LIBRARY, name=name, bom_ref=f"optional-{name}", purl=PackageURL("pypi", name=name),
                       description=f"optional: {line}") for name, line in sorted(wanted.items())]
    needs.append(Component(type=ComponentType.LIBRARY, name="nvidia-cuda-nvrtc", bom_ref="optional-nvrtc",
                           purl=PackageURL("pypi", name="nvidia-cuda-nvrtc"),
                           description="optional: compiles CUDA kernels at run time"))
    bom.components.update(needs)
    bom.register_dependency(root, needs)
    (folder / f"flash-dmattn-{version}.cdx.json").write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
