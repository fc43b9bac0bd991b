"""What a notebook has of a simulation that has ended: a result that shows itself, and the clients' own models.

Nothing here simulates: this room reads the folder of a finished run and computes with its models. `coordinator`
re-exports `SimulationResult`. Nothing is imported by this file.

Read in this order: `result` (what ``simulate`` returns), `clients` (its clients), `run_folder` (the folder that both
read), `restored` (models and samples as they are after the run), `personal_file` (a model as one ONNX
file), `confusion` and `comparison` (what is computed from answers), `tables` and `picture` (how all that is shown).
"""
