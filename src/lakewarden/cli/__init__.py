"""The command line.

`main` has the commands, `options` reads, `conduct` asks and shows, `output` renders, `session`
starts Spark, `demo` demonstrates.
"""
