"""The index of the extensions: data alone, so that a plain run loads none of them.

An extension is a class, MODULE:CLASS, with what kempner.train.extensions.Extension may give.
"""

RL = "kempner.extensions.rl.extension:RlExtension"
LOWCOMM = "kempner.extensions.lowcomm.extension:LowcommExtension"
PREFERENCE = "kempner.extensions.preference.extension:PreferenceExtension"
PLANNER = "kempner.extensions.planner.extension:PlannerExtension"
HF = "kempner.extensions.hf.extension:HfExtension"

# The first word of a section, in a file or on the command line, that is an extension's.
SECTIONS = {"lowcomm": LOWCOMM, "preference": PREFERENCE, "rl": RL, "bench": PLANNER}

# An option of the trainer that asks for an extension, where it is not at its default. For those of
# [model] but the first there may be no form of Hugging Face, which is worth a warning.
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
ADVICE = PLANNER  # what a run asks about its memory
