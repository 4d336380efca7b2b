"""Tasks: what is to be done to which table, when, by whom, and what became of it.

`queue` holds the tasks, `config` says what applies to a table, `scheduling` says when it is worthwhile,
`commits` brings the two together when a table has changed.  Nothing here starts Spark; workers do.
"""
