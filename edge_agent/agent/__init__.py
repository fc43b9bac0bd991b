"""The agent: the program that runs on a device, from its first hello to the head that it fits for a new bundle.

Here lives what belongs to a running agent: its loop, what is in transfer, what it works on, and what it notes on its
disk. What a coordinator or a simulation also needs (messages, storage, bundles, privacy) lies in the rooms below.
Nothing here imports torch when it is loaded, and numpy, ONNX Runtime and scikit-learn come with the first task.

Read in this order: `app` (start and stop of the program), `runtime` (what an agent runs on), `event_loop` (events and
timers), `transfers` (the update in the outbox, and downloads), `tasks.task_queue` (what is worked on next),
`tasks.runner` and the purposes in `tasks`, `head_tier` with `candidate` and `release_record` (new bundles on a device
without torch), `secure` (secure sums), `health` (faults and silence), then the rest by name.
"""
