"""The index of the extensions: data alone, so that a plain run loads none of them.

An extension is a class, MODULE:CLASS, that implements parts of kempner.train.extensions.Extension.
"""

RL = "kempner.extensions.rl.extension:RlExtension"
LOWCOMM = "kempner.extensions.lowcomm.extension:LowcommExtension"
PREFERENCE = "kempner.extensions.preference.extension:PreferenceExtension"
PLANNER = "kempner.extensions.planner.extension:PlannerExtension"
HF = "kempner.extensions.hf.extension:HfExtension"

# The first word of an extension's section, in a file or on the command line.
SECTIONS = {"lowcomm": LOWCOMM, "preference": PREFERENCE, "rl": RL, "bench": PLANNER}

# Options of the trainer that load an extension when they are not at their defaults. Those of
# [model], except the first, may have no Hugging Face form, which is worth a warning.
KEYS = {
    "model.init_from": HF,
    "run.fork": HF,
    "model.attention_softcap": HF,
    "model.post_norms": HF,
    "model.qk_norm": HF,
    "model.qkv_bias": HF,
    "model.n_experts": HF,
    "model.shared_experts": HF,
    "model.router": HF,
    "model.router_scale": HF,
    "model.router_bias": HF,
}

FLAGS = {"build": PLANNER, "bench": PLANNER}  # of the trainer's command line
ADVICE = PLANNER  # for a run's questions about its memory
