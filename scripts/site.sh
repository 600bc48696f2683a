#!/usr/bin/env bash
# site.sh: the documentation site from README.md and docs/, by Sphinx (docs/conf.py), into build-site/. It needs the pages
# and Sphinx alone, and no network once that is there. A link, an anchor or an image that leads nowhere is an error, so is
# a page that no navigation names, and so is anything that the pages would load from elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh site
rm -rf build-site
.venv/bin/python -m sphinx --quiet --jobs 2 --nitpicky --fail-on-warning --keep-going --conf-dir docs \
    --doctree-dir build-site/.doctrees . build-site
rm -rf build-site/.doctrees build-site/.buildinfo build-site/objects.inv
cp build-site/README.html build-site/index.html
if grep -rlE --include='*.html' '<(script|link|img|iframe|source)[^>]*(src|href)="(https?:)?//' build-site; then
    echo "site: the pages above load something from elsewhere" >&2
    exit 1
fi
echo "site: $(find build-site -name '*.html' | wc -l) pages; the first is build-site/index.html"
