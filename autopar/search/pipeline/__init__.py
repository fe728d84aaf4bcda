"""The search over pipeline stages.

Which numbers of device groups and microbatches are possible (`pipeline_numbers`) and searched (`pipeline_search`),
where layers are cut into stages (`stage_cuts`), what each device group runs (`group_strategies`), which of it is
fastest (`pipeline_candidates`), and what else is near that (`refinement`).
"""
