"""What a run would do and take: the headers of its inputs, and a short trial."""
