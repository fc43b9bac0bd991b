"""The personal model of a device: features from a frozen encoder, a head fitted on them, and how good it is. No torch.

Read in this order: `personalizer` (the interface for Python), `personalize` (one fit from samples to scores), `fitting`
(which head is fitted, and how), `encoder` (the only importer of ONNX Runtime on a device), `self_test`, `precision`,
`variants` and `batch_norm` (which variant computes right here, and whose statistics), `choice` (which head), `blend` (a
head together with a model of the raw inputs), `confidence` (calibrated probabilities), `detectors` and `unknown` (which
inputs are unlike the training samples, and how often that is missed), `drift` (whether inputs have changed since),
`numeric` (heads that answer numbers), `local` (what the device could do alone), `one_file` (encoder and head for other
runtimes). Heads themselves live in `heads`, data sources in `data`.
"""
