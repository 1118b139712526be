"""What a namespace has published: index, lineage, families, ablations. All of it is read from cards."""
