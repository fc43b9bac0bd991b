"""What a device does when its coordinator asks for something: jobs of a run, bundles to install, heads to refit.

Each purpose of a job is one class in one module, behind the contract in `purpose`. Nothing outside those modules asks
for what purpose a job is: a new one is a module with its class, and a row in `table`.

Read in this order: `purpose` (the contract: what a job gets, what it may use, what it returns), `table` (purpose ->
class), `train` (the longest one, with `update_steps`: noise and masks between the training and the outbox),
`personalize`, `batch_norm_stats`, `activation_ranges`, `contribute` (a round without torch) and `secure_exchanges` (the
messages around a secure sum). `bundles`, `install` and `refit` do the same for bundles and heads. `resources` is what
all of them share, `runner` runs them in the worker beside the agent's loop, and `task_queue` decides in the loop which
one is next.

No module here imports torch or numpy when it is loaded: an idle agent does without.
"""
