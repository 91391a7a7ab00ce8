"""Pipeline parallelism: peers too small for the model form one replica as stages."""
