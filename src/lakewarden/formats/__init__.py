"""What a table is: how its files are named and which of them a version needs."""
