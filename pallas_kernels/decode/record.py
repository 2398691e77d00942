"""A record: one rank's part of one routed expert, MXFP4 codes and scales together, so that one DMA brings it.

int32 [rows, L], L the latent width, F the expert width of this rank. Gate and up, [L inputs, 2F outputs], stand as the
matrix unit wants weights, inputs from top to bottom, without padding: 64 outputs side by side four times, for the four
quarters of the inputs, are 256 lanes; the 2F / 64 such columns are put one below the other, and the pile
[2F L / 256, 256] is cut into L / 256 stretches of 2F rows, which stand side by side again. So a stretch is 256 lanes of

    codes of gate and up    2F / 8 rows           word (i, l): nibble t is row 8 i + t of the stretch
    codes of down           F / 8 rows            word (i, l): nibble t is hidden channel 8 i + t of output l
    scales of gate and up   ceil(2F / 128) rows   word (i, l): byte t is the E8M0 scale of rows 32 (4 i + t) to + 31
    scales of down          ceil(F / 128) rows    word (i, l): byte t is that of hidden channels 32 (4 i + t) to + 31

Outputs are gate's F, then up's. Every rank holds a slice of every expert, hence no choice of experts makes one rank
wait for another.
"""

from dataclasses import dataclass

from pallas_kernels.decode.config import DecodeConfig, round_up

GROUP = 32  # codes that share a scale
PER_WORD = 8  # codes in a word
SCALES = 4  # scales in a word
OUTPUTS = 64  # side by side
QUARTERS = 4  # of the inputs, side by side
STRETCH = OUTPUTS * QUARTERS  # lanes


@dataclass(frozen=True)
class Record:
    latent: int
    expert: int

    @staticmethod
    def of(config: DecodeConfig) -> "Record":
        return Record(config.moe.latent, config.share(config.moe.expert))

    @property
    def stretches(self) -> int:
        return self.latent // STRETCH

    @property
    def columns(self) -> int:
        return 2 * self.expert // OUTPUTS

    @property
    def quarter(self) -> int:
        """Inputs in a quarter, rows of a column."""
        return self.latent // QUARTERS

    @property
    def groups(self) -> int:
        """Groups of 32 rows in a stretch."""
        return 2 * self.expert // GROUP

    @property
    def up_rows(self) -> int:
        return 2 * self.expert // PER_WORD

    @property
    def down_rows(self) -> int:
        return self.expert // PER_WORD

    @property
    def up_scale_start(self) -> int:
        return self.up_rows + self.down_rows

    @property
    def up_scale_rows(self) -> int:
        return -(-self.groups // SCALES)

    @property
    def down_scale_start(self) -> int:
        return self.up_scale_start + self.up_scale_rows

    @property
    def down_scale_rows(self) -> int:
        return -(-self.expert // (GROUP * SCALES))

    @property
    def shape(self) -> tuple[int, int]:
        return round_up(self.down_scale_start + self.down_scale_rows, 8), self.latent
