"""What a namespace has published: index, lineage, families, ablations. Read from cards alone."""
