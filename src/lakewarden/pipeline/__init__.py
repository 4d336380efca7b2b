"""PySpark: frames in, frames out.  No policy, no session, no list of paths on the driver.

    units ─► listing ─► objects ─► history ─► decisions ─► references ─┐
                          └───────────────────────────────────────────┴► verdicts ─► deletion

Every stage carries `root_id`, so a fleet of a thousand tables is one job.  Only the DataFrame API
is used, so the same code runs in local mode, on a cluster and through Spark Connect.

Storage errors never fail a task: they become rows (`note` = "error"), so one table's trouble
stays that table's.  Requests are counted the same way (`note` = "requests").
"""
