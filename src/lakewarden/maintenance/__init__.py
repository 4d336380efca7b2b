"""The operations.  Each decides first (`plan`) and acts after (`execute`).

`fleet` says which tables are meant and that none of them overlap, `survey` reads what is there,
`cleanup` and `orphans` make plans of it, `plan` is what a plan is, `safety` what may stop one,
`removal` executes it.
"""
