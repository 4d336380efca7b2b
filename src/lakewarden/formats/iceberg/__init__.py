"""Iceberg: `catalog`, file names (`layout`), `manifests`, table `metadata`, and `paths`."""
