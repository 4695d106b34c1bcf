#!/bin/sh
# Put the pictures of Pillow's own tests (from the sdist of pillow 12.0.0) into the folder $1, with the pip of the Python
# in $2 (default: python3). Leaves nothing where that is not possible; the test that needs them then says so.
set -u
target=$1
python=${2:-python3}
mkdir -p "$(dirname "$target")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary pillow --dest "$scratch" \
    pillow==12.0.0 >/dev/null 2>&1
for archive in "$scratch"/pillow-12.0.0.tar.gz; do
    if [ -f "$archive" ] && tar -xzf "$archive" -C "$scratch" pillow-12.0.0/Tests/images; then
        rm -rf "$target"
        mv "$scratch/pillow-12.0.0/Tests/images" "$target"
    else
        echo "the sdist of pillow 12.0.0 cannot be had here: the test with its pictures will be skipped" >&2
    fi
done
exit 0
