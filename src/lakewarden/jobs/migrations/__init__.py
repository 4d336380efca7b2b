"""How the tables of the service's database came to be what they are, step by step."""
