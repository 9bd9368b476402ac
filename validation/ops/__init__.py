"""The contract of an op table: every op of every table against the reference. `python -m haarkv.validation.ops --help`.

`tables` lists the tables, `cases` holds one class an op, `suite` the cases themselves.
"""
