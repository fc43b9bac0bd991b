"""Classify a photo with a model of ``edge-agent export``: ``python answer.py cat.onnx photo.jpg``."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

# 1. Load the model, and the description in its metadata.
session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["headwater"])
_, height, width, channels = about["input"]["shape"]
# 2. Turn the photo upright, and resize it. The model normalises the pixels.
photo = ImageOps.exif_transpose(Image.open(sys.argv[2])).convert("RGB" if channels == 3 else "L")
pixels = np.asarray(photo.resize((width, height), Image.Resampling.BILINEAR)).reshape(1, height, width, channels)
# 3. Run the model, and print the most probable label.
(probabilities,) = session.run(["probabilities"], {"image": pixels})
print(about["labels"][probabilities[0].argmax()], f"{probabilities[0].max():.3f}")
