"""The MindSpeed that the patches were written against and run with (branch core_r0.16.0, commit e477249)."""

VERSIONS = "mindspeed>=0.16,<0.17"
