"""The HTTP API: what administrators and programs ask of the task queues, under Lakekeeper's names.

`app` puts the parts together.  Async lives here only; whatever waits for a database or a store runs in
a thread.  Nothing here starts Spark.
"""
