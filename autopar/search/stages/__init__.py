"""The search over pipeline stages.  In the order in which they are used: `settings` (which numbers of device groups and
microbatches), `setting` and `problem` (what layers take there), `cuts`, `paths` and `exact` (where to cut and what each
group runs), `solve` (which of it is fastest), `prediction` and `assembly` (the stages of the plan).
"""
