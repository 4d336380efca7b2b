"""The command line: `main` parses and calls, `output` renders, `session` starts Spark, `demo` shows."""
