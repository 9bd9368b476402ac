"""The contract of an op table: every op of every table against the reference. `python -m haarkv.validation.ops --help`.

`tables` lists the tables, `cases` has the kinds of cases (over the caches of `caches`), `suite` the cases themselves.
"""
