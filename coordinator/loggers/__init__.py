"""Loggers: where a simulation's figures go beside its own folder, such as files of tables, TensorBoard, MLflow or W&B.

Each kind of log is a file here whose name ends in ``_log``: ``--log csv`` is `csv_log`. Another package adds one by
the entry-point group ``headwater.loggers``. What may live here: what a log gets, how it is written, and what happens
when that fails. What may not: anything that simulates; nothing here knows where the figures come from.

Read in this order: `records` (what a log gets), `base` (the contract), `choice` (which log a text names), `delivery`
(each log has a thread of its own, so that none delays a run), `run_logs` (the logs of one run, and of a parent of
several), then the kinds, beginning with `log_files` and `jsonl_log`; `wandb_file` reads what `wandb_log` has written.
"""
