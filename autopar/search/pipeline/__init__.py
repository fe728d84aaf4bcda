"""The search over pipeline stages.

Which numbers of device groups and microbatches (`pipeline_search`), where layers are cut into stages (`stage_cuts`),
what each device group runs (`group_strategies`), and which of it is fastest (`pipeline_candidates`).
"""
