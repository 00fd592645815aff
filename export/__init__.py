"""draftc.export: the compiler. Needs torch, transformers and onnx; `draftc.runtime` needs none of them."""
