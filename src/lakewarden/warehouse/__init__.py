"""One log that orders every change of every table of a warehouse.

`manifest` says what a warehouse is at one version, `conflicts` which changes get along, `commit` how
a change becomes a version.  These decide and know no table format.
"""
