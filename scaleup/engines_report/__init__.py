"""The laboratory: measurements on real engines for tests and reports/scaleup_engines. Imports everything; nothing imports it."""
