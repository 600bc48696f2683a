// attention.go: attention of float32 slices on the CPU, forward and backward, by cgo. cgo lets Go pass pointers to
// slices, but none to structs that hold such pointers, so that C fills fdm_tensors.
package main

/*
#cgo pkg-config: flash_dmattn
#include <flash_dmattn.h>

typedef struct { int64_t batch, heads, heads_kv, rows, keys, head_dim, head_dim_v; } sizes;

// dout NULL: the forward, which writes out and lse.
static fdm_status attention(sizes n, fdm_options options, float *q, float *k, float *v, float *out, float *lse,
                            float *dout, float *dq, float *dk, float *dv) {
	int64_t q_shape[] = {n.batch, n.rows, n.heads, n.head_dim}, k_shape[] = {n.batch, n.keys, n.heads_kv, n.head_dim};
	int64_t v_shape[] = {n.batch, n.keys, n.heads_kv, n.head_dim_v};
	int64_t out_shape[] = {n.batch, n.rows, n.heads, n.head_dim_v}, lse_shape[] = {n.batch, n.heads, n.rows};
	fdm_tensor t[9] = {
		{.data = q, .shape = q_shape}, {.data = k, .shape = k_shape}, {.data = v, .shape = v_shape},
		{.data = out, .shape = out_shape}, {.data = lse, .shape = lse_shape}, {.data = dout, .shape = out_shape},
		{.data = dq, .shape = q_shape}, {.data = dk, .shape = k_shape}, {.data = dv, .shape = v_shape},
	};
	for (int i = 0; i < 9; i++) {
		t[i].device.type = FDM_CPU;
		t[i].ndim = i == 4 ? 3 : 4;
		t[i].dtype = fdm_data_type_of(FDM_FLOAT32);
	}
	fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = t, .k = t + 1, .v = t + 2, .out = t + 3, .lse = t + 4};
	if (!dout)
		return fdm_attention_forward(&tensors, &options, NULL);
	tensors.dout = t + 5, tensors.dq = t + 6, tensors.dk = t + 7, tensors.dv = t + 8;
	return fdm_attention_backward(&tensors, &options, NULL);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime"
)

// Sizes of a problem: q [Batch, Rows, Heads, HeadDim], k and v [Batch, Keys, HeadsKV, HeadDim or HeadDimV].
type Sizes struct{ Batch, Heads, HeadsKV, Rows, Keys, HeadDim, HeadDimV int }

// Options of a problem. Window: keys to the left of the diagonal that a row sees, 0 for all.
type Options struct {
	Causal bool
	Window int
}

// Forward returns out [Batch, Rows, Heads, HeadDimV] and lse [Batch, Heads, Rows].
func Forward(n Sizes, o Options, q, k, v []float32) (out, lse []float32, err error) {
	if err = check(n, q, k, v); err != nil {
		return nil, nil, err
	}
	out, lse = make([]float32, n.Batch*n.Rows*n.Heads*n.HeadDimV), make([]float32, n.Batch*n.Heads*n.Rows)
	return out, lse, call(n, o, q, k, v, out, lse, nil, nil, nil, nil)
}

// Backward returns the gradients of q, k and v for dout, that of out. out and lse are those of Forward.
func Backward(n Sizes, o Options, q, k, v, out, lse, dout []float32) (dq, dk, dv []float32, err error) {
	if err = check(n, q, k, v); err != nil {
		return nil, nil, nil, err
	}
	if rows := n.Batch * n.Rows * n.Heads; len(out) != rows*n.HeadDimV || len(dout) != len(out) || len(lse) != rows {
		return nil, nil, nil, fmt.Errorf("out, dout and lse have %d, %d and %d elements; %+v needs other numbers",
			len(out), len(dout), len(lse), n)
	}
	dq, dk, dv = make([]float32, len(q)), make([]float32, len(k)), make([]float32, len(v))
	return dq, dk, dv, call(n, o, q, k, v, out, lse, dout, dq, dk, dv)
}

func check(n Sizes, q, k, v []float32) error {
	for _, size := range []int{n.Batch, n.Heads, n.HeadsKV, n.Rows, n.Keys, n.HeadDim, n.HeadDimV} {
		if size < 1 || size > 1<<15 {
			return fmt.Errorf("%+v has a size of %d; from 1 to 32768 is allowed here", n, size)
		}
	}
	keys := n.Batch * n.Keys * n.HeadsKV
	if len(q) != n.Batch*n.Rows*n.Heads*n.HeadDim || len(k) != keys*n.HeadDim || len(v) != keys*n.HeadDimV {
		return fmt.Errorf("q, k and v have %d, %d and %d elements; %+v needs other numbers", len(q), len(k), len(v), n)
	}
	return nil
}

func call(n Sizes, o Options, q, k, v, out, lse, dout, dq, dk, dv []float32) error {
	runtime.LockOSThread() // fdm_last_error() is that of the thread
	defer runtime.UnlockOSThread()
	sizes := C.sizes{
		batch: C.int64_t(n.Batch), heads: C.int64_t(n.Heads), heads_kv: C.int64_t(n.HeadsKV), rows: C.int64_t(n.Rows),
		keys: C.int64_t(n.Keys), head_dim: C.int64_t(n.HeadDim), head_dim_v: C.int64_t(n.HeadDimV),
	}
	options := C.fdm_options_default()
	if o.Causal {
		options.causal = 1
	}
	if o.Window != 0 {
		options.window_left = C.int64_t(o.Window)
	}
	at := func(slice []float32) *C.float {
		if len(slice) == 0 {
			return nil
		}
		return (*C.float)(&slice[0])
	}
	if C.attention(sizes, options, at(q), at(k), at(v), at(out), at(lse), at(dout), at(dq), at(dk), at(dv)) != C.FDM_OK {
		return errors.New(C.GoString(C.fdm_last_error()))
	}
	return nil
}

func main() {
	n := Sizes{Batch: 1, Heads: 1, HeadsKV: 1, Rows: 3, Keys: 3, HeadDim: 4, HeadDimV: 4}
	q, k, v := make([]float32, 12), make([]float32, 12), make([]float32, 12)
	for i := range q {
		q[i], k[i], v[i] = 0.1*float32(i), 0.2*float32(i%5), float32(i+1)
	}
	out, lse, err := Forward(n, Options{Causal: true}, q, k, v)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("out[0] = %g, lse[0] = %g\n", out[0], lse[0])
}
