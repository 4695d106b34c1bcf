"""Does an output still hold? Against its inputs, read again, or against another output."""
