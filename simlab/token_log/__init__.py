"""Every sampled token in Parquet: schema, files, rows, pairs. Imports core, stabilizers and study/files.py."""
