"""``python -m vlmembed``."""

from vlmembed.cli import main

main()
