"""Lakewarden looks after versioned tables: Lance datasets, one at a time or a fleet in one job."""
